"""Results as text: the terminal and JSON. Values in, text out; nothing here measures."""

from vramfit.report import against, fragmentation, leaks, remedy_table, terminal  # noqa: F401 - each registers its reports
from vramfit.report.check import CHECK_SCHEMA as CHECK_SCHEMA
from vramfit.report.check import Check as Check
from vramfit.report.diff import DIFF_SCHEMA as DIFF_SCHEMA
from vramfit.report.explain import Explanation as Explanation
from vramfit.report.fit_ranks import FIT_RANKS_SCHEMA as FIT_RANKS_SCHEMA
from vramfit.report.html import render_html as render_html
from vramfit.report.html import render_trace_html as render_trace_html
from vramfit.report.html import write_page as write_page
from vramfit.report.json_report import SCHEMA as SCHEMA
from vramfit.report.perfetto import write_perfetto as write_perfetto
from vramfit.report.ranks import RANKS_SCHEMA as RANKS_SCHEMA
from vramfit.report.rendering import json_text as json_text
from vramfit.report.rendering import print_report as print_report
from vramfit.report.rendering import render as render
from vramfit.report.rendering import to_json as to_json
from vramfit.report.table_file import write_csv as write_csv
from vramfit.report.together import TOGETHER_SCHEMA as TOGETHER_SCHEMA
from vramfit.report.tune import TUNE_SCHEMA as TUNE_SCHEMA
from vramfit.writing import check_writable as check_writable
from vramfit.writing import write_text as write_text
