"""The page of `train.diagnose`: one file that needs nothing else, as a browser shows it."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser import CHROMIUM, Browser, Page

import jaxamp
from train.diagnose import Diagnosed
from train.enquiry.bisect import Bisection
from train.enquiry.finding import Finding, not_checked, ok
from train.reports.diagnosis_page import html
from train.reports.range_chart import _middle


@pytest.fixture(scope="module")
def result():
    def loss(params, x):
        with jax.named_scope("blocks/attention/BNTS,BSNH->BTNH"):
            x = x @ params["w"]
        with jax.named_scope("head"):
            return jnp.mean((x @ params["w"]) ** 2)

    params = {"w": jax.random.normal(jax.random.key(0), (8, 8))}
    updates = jax.tree.map(lambda w: w * 1e-9, params)
    diagnosed = jaxamp.diagnose(loss, "compute=f16")
    diagnosis = diagnosed(params, jnp.ones((4, 8)), loss_scale=1024.0, updates=updates)
    findings = [
        ok("the batch is <in> order", "1,024 labels are counted")._replace(question="Data?"),
        Finding("suspect", "it may be", ("loss nan",), "see below", "Only 16 bits?"),
        Finding("cause", "an overflow in " + "long/" * 30, (), "try --policy 'f'", "Operation?"),
        not_checked("for want of batches")._replace(question="Order?"),
    ]
    case = SimpleNamespace(source="runs/a", policy="compute=f16", step=7, notes=("a note",))
    words = ("finite", "not finite", ("head",), "compute=f16,full=head", "finite", True, 4)
    return Diagnosed(case, findings, diagnosis, Bisection(*words), 30.0, 300.0)


def test_the_page_says_all_that_was_found_and_needs_nothing_else(result):
    text = html(result, "python -m train.diagnose runs/a")
    body = text.partition("<body>")[2]
    assert re.sub("<.*?>", " ", body).split()[:3] == ["cause", "an", "overflow"]
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|<script", text)
    assert "the batch is &lt;in&gt; order" in body and "<strong>Note:</strong> a note" in body
    for found in result.findings:
        assert found.question in body
    page = Page(text)
    assert [f["id"] for f in page.all("figure")] == ["ranges-activation", "ranges-gradient"]
    assert "head 2^" in page.all("img")[0]["alt"]
    assert "compute=f16,full=head" in body and "params/w" in body
    without = html(result._replace(diagnosis=None, bisection=None), "command")
    assert "<figure" not in without and "smallest set" not in without


@pytest.mark.parametrize("seed", range(3))
def test_the_middle_of_a_range_is_between_percentiles(seed):
    sizes = np.exp2(np.random.default_rng(seed).normal(0, 5, 1000)).astype(np.float32)
    low, high = np.log2(np.percentile(sizes, [1, 99]))
    found = _middle(jaxamp.census.count(np.concatenate([sizes, np.zeros(500, np.float32)])))
    # Whole powers of two; numpy interpolates between two of the numbers.
    np.testing.assert_allclose(found, [low, high], atol=1.5)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(390, 844), (1280, 800)])
def test_browser_shows_the_page(result, tmp_path, size, scheme):
    path = tmp_path / "page.html"
    path.write_text(html(result, "python -m train.diagnose " + "a" * 200))
    with Browser(tmp_path / "profile") as browser:
        browser.open(path, *size, scheme)
        wide = "[innerWidth, document.documentElement.scrollWidth]"
        assert browser.evaluate(wide) == [size[0], size[0]]
        shown = browser.evaluate("[...document.images].map(i => i.complete && i.naturalWidth > 0)")
        assert shown == [True, True]
        assert browser.complaints() == []
