"""Results as text: the terminal and JSON. Values in, text out; nothing here measures."""

from vramfit.report.against import against_to_json, print_against, render_against
from vramfit.report.check import CHECK_SCHEMA, Check, check_to_json, print_check, render_check
from vramfit.report.diff import DIFF_SCHEMA, diff_to_json, print_diff, render_diff
from vramfit.report.explain import Explanation, explanation_to_json, print_explanation, render_explanation
from vramfit.report.fragmentation import fragmentation_to_json, print_fragmentation, render_fragmentation
from vramfit.report.html import render_html, render_trace_html, write_page
from vramfit.report.json_report import SCHEMA, render_json, run_to_json
from vramfit.report.leaks import leaks_to_json, print_leaks, render_leaks
from vramfit.report.perfetto import write_perfetto
from vramfit.report.stress import (
    STRESS_SCHEMA,
    print_stress,
    render_stress,
    render_stress_json,
    render_stress_svg,
    stress_to_json,
)
from vramfit.report.table_file import write_csv
from vramfit.report.terminal import print_terminal, render_terminal
from vramfit.report.tune import TUNE_SCHEMA, print_tuning, render_tuning, render_tuning_json, tuning_to_json
from vramfit.writing import check_writable, write_text

__all__ = [
    "CHECK_SCHEMA",
    "DIFF_SCHEMA",
    "SCHEMA",
    "STRESS_SCHEMA",
    "TUNE_SCHEMA",
    "Check",
    "Explanation",
    "against_to_json",
    "check_to_json",
    "check_writable",
    "diff_to_json",
    "explanation_to_json",
    "fragmentation_to_json",
    "leaks_to_json",
    "print_against",
    "print_check",
    "print_diff",
    "print_explanation",
    "print_fragmentation",
    "print_leaks",
    "print_stress",
    "print_terminal",
    "print_tuning",
    "render_against",
    "render_check",
    "render_diff",
    "render_explanation",
    "render_fragmentation",
    "render_html",
    "render_json",
    "render_leaks",
    "render_stress",
    "render_stress_json",
    "render_stress_svg",
    "render_terminal",
    "render_trace_html",
    "render_tuning",
    "render_tuning_json",
    "run_to_json",
    "stress_to_json",
    "tuning_to_json",
    "write_csv",
    "write_page",
    "write_perfetto",
    "write_text",
]
