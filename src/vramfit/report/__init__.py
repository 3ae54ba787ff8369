"""Results as text: the terminal and JSON. Values in, text out; nothing here measures."""

from vramfit.report import against, fragmentation, leaks, terminal  # noqa: F401 - each registers its reports
from vramfit.report.check import CHECK_SCHEMA, Check
from vramfit.report.diff import DIFF_SCHEMA
from vramfit.report.explain import Explanation
from vramfit.report.html import render_html, render_trace_html, write_page
from vramfit.report.json_report import SCHEMA
from vramfit.report.perfetto import write_perfetto
from vramfit.report.rendering import json_text, print_report, render, to_json
from vramfit.report.stress import STRESS_SCHEMA, render_stress_svg
from vramfit.report.table_file import write_csv
from vramfit.report.tune import TUNE_SCHEMA
from vramfit.writing import check_writable, write_text

__all__ = [
    "CHECK_SCHEMA",
    "DIFF_SCHEMA",
    "SCHEMA",
    "STRESS_SCHEMA",
    "TUNE_SCHEMA",
    "Check",
    "Explanation",
    "check_writable",
    "json_text",
    "print_report",
    "render",
    "render_html",
    "render_stress_svg",
    "render_trace_html",
    "to_json",
    "write_csv",
    "write_page",
    "write_perfetto",
    "write_text",
]
