"""The page of a running ComfyUI with our pack, in a real browser, with LiteGraph nodes and with Nodes 2.0.

Needs what the test extra does not install: ``pip install playwright`` and a Chromium of the system, which plays
H.264. Nothing is downloaded, and the page may talk to this machine only.
"""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = json.loads((ROOT / "example_workflows" / "wan_streaming_decode.json").read_text(encoding="utf-8"))
WIDTH, HEIGHT, SECONDS = 128, 96, 5 / 16
READY_MS, RUN_MS = 180_000, 240_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--autoplay-policy=no-user-gesture-required"]
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Workflow.ShowMissingModelsWarning": False}
VIDEO = "[...document.querySelectorAll('video')].find((video) => video.videoWidth > 0)"
DECODE = "app.graph.nodes.find((node) => node.comfyClass === 'LowmemWanStreamingDecode')"
pytestmark = pytest.mark.timeout(900)


class Page:
    """A page of ComfyUI, and what it said and asked for.

    Args:
        page: Playwright's page.
    """

    def __init__(self, page: Any) -> None:
        self._page = page
        self.complaints: list[str] = []
        self.hosts: set[str | None] = set()
        page.on("console", lambda message: self._hear(f"{message.type}: {message.text} {message.location}"))
        page.on("pageerror", lambda error: self._hear(f"error: {error}"))
        page.on("request", lambda request: self._ask(request.url))

    def _hear(self, line: str) -> None:
        if line.startswith(("error", "warning")):
            self.complaints.append(line)

    def _ask(self, url: str) -> None:
        if urlsplit(url).scheme.startswith(("http", "ws")):
            self.hosts.add(urlsplit(url).hostname)

    def run(self, script: str, argument: Any = None) -> Any:
        """Return what ``script`` gives on the page."""
        return self._page.evaluate(script, argument)

    def wait(self, condition: str, limit_ms: int = RUN_MS) -> None:
        """Return when ``condition`` holds on the page."""
        self._page.wait_for_function(condition, timeout=limit_ms)

    def open(self, address: str) -> None:
        """Load the page and the example workflow into it."""
        self._page.goto(address)
        self.wait(
            "() => window.app?.extensionManager && window.app.graph && window.app.vueAppReady !== false", READY_MS
        )
        self.wait("() => window.app.extensions.some((one) => one.name.startsWith('LowMem'))", READY_MS)
        self.run("(workflow) => app.loadGraphData(workflow, true, true)", EXAMPLE)
        self.wait(f"() => {DECODE}?.widgets?.length > 0", READY_MS)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Return a running Chromium of the system, or skip."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no chromium on the path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=[False, True], ids=["litegraph", "nodes2"])
def page(request: pytest.FixtureRequest, chromium: Any, server: Any) -> Iterator[Page]:
    """Return the page in one of the two ways of drawing nodes, with the example workflow on it."""
    for name, value in (SETTINGS | {"Comfy.VueNodes.Enabled": request.param}).items():
        server.call(f"/settings/{name}", value)
    context = chromium.new_context()
    opened = Page(context.new_page())
    opened.open(f"http://127.0.0.1:{server.port}/")
    opened.run(f"() => {{ {DECODE}.widgets.find((one) => one.name === 'crf').value = {20 + request.param} }}")
    yield opened
    context.close()


def test_the_extension_marks_the_node(page: Page) -> None:
    """Our script was loaded and has seen the node."""
    assert page.run("() => app.extensions.filter((one) => one.name === 'LowMem.VideoPreview').length") == 1
    assert page.run(f"() => {DECODE}.previewMediaType") == "video"


def test_the_example_fills_the_widgets(page: Page) -> None:
    """Every widget has the value that the workflow holds for it, as the page would send it."""
    inputs = page.run("async () => (await app.graphToPrompt()).output")["3"]["inputs"]
    names = ["fps", "codec", "bit_depth", "filename_prefix", "destination", "tiling", "tile_size", "keep_partial"]
    assert [inputs[name] for name in names] == [16, "h264", "8", "video/lowmem", "output", "auto", 256, True]
    assert (inputs["samples"], inputs["vae"]) == (["1", 0], ["2", 0])


def test_a_run_from_the_page_shows_a_playing_video(page: Page, server: Any) -> None:
    """The queue button's way: the run succeeds, and the node shows the mp4, which plays to its end."""
    before = set(server.call("/history"))
    page.run("() => app.queuePrompt(0, 1)")
    page.wait(f"() => {VIDEO}")
    (prompt_id,) = set(server.call("/history")) - before
    assert server.finished(prompt_id)["status"]["status_str"] == "success"
    size = page.run(f"() => {{ const video = {VIDEO}; return [video.videoWidth, video.videoHeight, video.duration] }}")
    assert size == [WIDTH, HEIGHT, pytest.approx(SECONDS, abs=0.01)]
    page.run(f"() => {{ const video = {VIDEO}; video.loop = false; video.muted = true; return video.play() }}")
    page.wait(f"() => {VIDEO}.ended", 30_000)


def test_the_page_complains_of_nothing_of_ours_and_stays_at_home(page: Page) -> None:
    """After all of that no error or warning names the pack, and no request left this machine."""
    assert [line for line in page.complaints if "lowmem" in line.lower()] == []
    assert page.hosts <= {"127.0.0.1", "localhost"}


def test_every_node_has_a_help_page(server: Any) -> None:
    """The help panel finds the page of each node where it looks for it."""
    for name, info in server.call("/object_info").items():
        if info["python_module"] != "custom_nodes.lowmem":
            continue
        address = f"http://127.0.0.1:{server.port}/extensions/lowmem/docs/{name}.md"
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.read().decode().startswith(f"# {info['display_name']}\n")
