"""The page: sections from the logs of runs, filled into `page_files/` together with the library that draws charts.

The page loads nothing: its content security policy forbids every request, and allows only its own scripts, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import yaml

from thresher import __version__, durable
from thresher.config import parse_config
from thresher.errors import unusable_path
from thresher.optional import load
from thresher.redact import escape_control_chars, redact_text
from thresher.report import tables
from thresher.report.charts import MEAN, RAW, Chart
from thresher.report.curves import curve_charts, distribution_charts, frontier_charts
from thresher.report.run_files import RunFiles, read_runs

logger = logging.getLogger(__name__)

_FILES = Path(__file__).parent / "page_files"


class PageSection(NamedTuple):
    """A part of the page: charts, and what else the template shows under this id."""

    id: str
    title: str
    charts: Sequence[Chart] = ()
    content: Any = None


def render_page(runs: Sequence[RunFiles], now: datetime) -> str:
    """Return the report as one HTML document."""
    jinja2, bundle = _import("jinja2"), vega_bundle()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        # not of Markup, a subclass of str: text that is already safe
        finalize=lambda value: escape_control_chars(redact_text(value)) if type(value) is str else value,
    )
    sections = [each for each in sections_of(runs) if each.charts or each.content]
    scripts = [_embeddable(script) for script in (bundle, (_FILES / "page.js").read_text(encoding="utf-8"))]
    charts = [chart.to_json() for section in sections for chart in section.charts]
    page: str = environment.get_template("page.html").render(
        title=f"Report on {runs[0].title}" if len(runs) == 1 else f"Report on {len(runs)} runs",
        version=__version__,
        date=f"{now.day} {now:%B %Y, %H:%M}",
        runs=runs,
        sections=sections,
        verdict=tables.verdict,
        benchmark_headings=tables.BENCHMARK_HEADINGS,
        shown_samples=tables.NUM_SHOWN_SAMPLES,
        yaml=_to_yaml,
        policy=_security_policy(scripts),
        style=(_FILES / "page.css").read_text(encoding="utf-8"),
        charts=jinja2.utils.htmlsafe_json_dumps(charts, separators=(",", ":"), allow_nan=False),
        scripts=scripts,
    )
    return page


def sections_of(runs: Sequence[RunFiles]) -> list[PageSection]:
    """All sections in order, including empty ones."""
    defaults = parse_config({}).model_dump(mode="json") if len(runs) == 1 else {}
    configs = tables.config_rows(runs, defaults) if any(run.config for run in runs) else None
    events, quiet = tables.health_events(runs), tables.quiet_runs(runs)
    recoveries, skipped = tables.recovery_rows(runs), tables.skipped_rows(runs)
    curves = curve_charts(runs)
    return [
        PageSection(
            "summary",
            "Summary",
            content={
                "outcome": tables.outcome_rows(runs),
                "settings": configs if len(runs) > 1 else None,
                "facts": tables.fact_rows(runs),
            },
        ),
        PageSection("health", "Health", content={"events": events, "quiet": quiet} if events or quiet else None),
        PageSection("curves", "Curves", curves, _describe_lines(curves)),
        PageSection("pairs", "Before and after", distribution_charts(runs)),
        PageSection("frontier", "Reward against distance", frontier_charts(runs)),
        PageSection("samples", "Answers", content=tables.samples_of(runs)),
        PageSection(
            "benchmarks",
            "Benchmarks",
            content=[(run.name, rows) for run in runs if (rows := tables.benchmark_rows(run.benchmarks))],
        ),
        PageSection("speed", "Speed", tables.speed_charts(runs), tables.speed_rows(runs)),
        PageSection(
            "interruptions",
            "Failures and skipped steps",
            content={"recoveries": recoveries, "skipped": skipped} if recoveries or skipped else None,
        ),
        PageSection("data", "Data", content=tables.data_reports(runs)),
        PageSection(
            "config", "Settings", content=None if configs is None else {"rows": configs if len(runs) == 1 else []}
        ),
        PageSection("environment", "Environment", content=tables.compare([run.section("environment") for run in runs])),
        PageSection("metrics", "All metrics", content=tables.metric_rows(runs)),
    ]


def _describe_lines(charts: Sequence[Chart]) -> str | None:
    parts = {each.labels["part"] for chart in charts for each in chart.series}
    if MEAN not in parts:
        return None
    return "Strong lines are moving means." if RAW in parts else "Lines of many steps are moving means."


@cache
def vega_bundle() -> str:
    """The JavaScript of Vega, Vega-Lite and Vega-Embed, 0.9 MB; Plotly's would fill the page with 4.8 MB."""
    script: str = _import("vl_convert").javascript_bundle()
    return script


def _import(name: str) -> ModuleType:
    return load("thresher report", name, extra="report")


def _embeddable(script: str) -> str:
    """Write a script so that no text in it ends its element or starts a comment in HTML."""
    return script.replace("</script", r"<\/script").replace("<!--", r"<\!--")


def _security_policy(scripts: Sequence[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    # Vega sets the style attributes of its elements; base-uri and form-action do not follow default-src
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _to_yaml(values: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return text


MAX_BYTES = 5_000_000


def write_report(directories: Sequence[Path], output: Path) -> None:
    """Read the runs and write the report in one piece: an existing file is replaced, or stays as it was."""
    runs = read_runs(directories)
    content = render_page(runs, datetime.now()).encode("utf-8", errors="replace")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(output, content)
    except OSError as error:
        raise unusable_path(str(output), error.strerror) from None
    if len(content) > MAX_BYTES:
        logger.warning("%s is larger than %s; report fewer runs at once", output, tables.format_size(MAX_BYTES))
    logger.info("report on %d run%s, %s", len(runs), "" if len(runs) == 1 else "s", tables.format_size(len(content)))
