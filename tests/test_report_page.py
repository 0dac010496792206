"""The report's page: one file that needs nothing else, as a browser shows it."""

import base64
import re
from xml.etree import ElementTree

import pytest
from browser import CHROMIUM, Browser, Page
from synthetic_runs import write

from train.report import write_report
from train.reports.conditions import Comparison

CHARTS = [
    "loss-difference",
    "train-loss",
    "eval-loss",
    "loss-scale",
    "grad-norm",
    "step-time",
    "memory",
]
OWN = {"report.html", "report.md", "report.json"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    runs = [
        write(root / f"{policy}-{seed}", policy, seed)
        for policy in ("float32", "mixed_bfloat16", "mixed_float16")
        for seed in range(3)
    ]
    write_report([Comparison("Runs", runs)], root / "report", "command", 0.02)
    return root / "report"


def test_the_verdict_comes_first(written):
    sentence = "mixed_bfloat16 matches float32 within 0.02 nats: "
    assert (written / "report.md").read_text().startswith(sentence)
    body = (written / "report.html").read_text().partition("<body>")[2]
    assert re.sub("<.*?>", " ", body).split()[:2] == ["within", "mixed_bfloat16"]


def test_page_needs_nothing_else(written):
    text = (written / "report.html").read_text()
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|<script", text)
    page = Page(text)
    assert [figure["id"] for figure in page.all("figure")] == CHARTS
    images, sources = page.all("img"), page.all("source")
    assert len(images) == len(sources) == len(CHARTS)
    for image, source in zip(images, sources, strict=True):
        assert source["media"] == "(prefers-color-scheme: dark)"
        assert len(image["alt"]) > 40
        assert source["srcset"] != image["src"]
        for uri in (source["srcset"], image["src"]):
            svg = base64.b64decode(uri.removeprefix("data:image/svg+xml;base64,"))
            for element in ElementTree.fromstring(svg).iter():
                links = [v for name, v in element.attrib.items() if name.endswith("href")]
                assert all(link.startswith("#") for link in links)
    assert {path.name for path in written.iterdir()} == OWN | {f"{name}.png" for name in CHARTS}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(390, 844), (1280, 800)])
def test_browser_shows_the_page(written, tmp_path, size, scheme):
    with Browser(tmp_path) as browser:
        browser.open((written / "report.html").resolve(), *size, scheme)
        wide = "[innerWidth, document.documentElement.scrollWidth]"
        assert browser.evaluate(wide) == [size[0], size[0]]
        text = browser.evaluate("document.body.innerText")
        assert "mixed_bfloat16 matches float32 within 0.02 nats" in text
        assert browser.evaluate("document.querySelectorAll('table.results tbody tr').length") > 20
        shown = browser.evaluate(
            "[...document.images].map(i => [i.complete && i.naturalWidth > 0, i.currentSrc])"
        )
        assert [loaded for loaded, _ in shown] == [True] * len(CHARTS)
        page = Page((written / "report.html").read_text())
        expected = [i["src"] for i in page.all("img")]
        if scheme == "dark":
            expected = [s["srcset"] for s in page.all("source")]
        assert [source for _, source in shown] == expected
        boxes = "document.querySelectorAll('.scroll, pre')"
        fits = f"[...{boxes}].every(e => e.getBoundingClientRect().right <= innerWidth)"
        assert browser.evaluate(fits)
        assert browser.complaints() == []
