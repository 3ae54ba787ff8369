"""A run or a trace as one HTML file that needs nothing but a browser: no network, no other file."""

from vramfit.report.html.page import render_html, render_trace_html, write_page

__all__ = ["render_html", "render_trace_html", "write_page"]
