"""Take screenshots of TensorBoard's tabs with finished runs, by a headless Chromium.

    python -m benchmarks.screenshots --logdir runs/digits --out runs/pictures

Needs Chromium on the machine (Debian: `apt-get install chromium`), and `pip install playwright` to drive it.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

TABS = {
    "scalars": "?tagFilter=rollout%2F(obj|acc|fos|op)|train%2F(kl|expl|entropy)&smoothing=0#timeseries",
    "custom_scalars": "?smoothing=0#custom_scalars",
    "images": "#images",
    "hparams": "#hparams",
}
"""URL suffix of each tab, by file name."""

WINDOW = (1500, 1250)
"""Width and height of the window in pixels."""

ANSWER_TIMEOUT_SECONDS = 60.0
"""Timeout for an answer of TensorBoard, in seconds."""

OBJECTIVE = "rollout/objective"
"""Tag whose points show how much TensorBoard has read."""

POLL_SECONDS = 5.0
"""Seconds between two counts of the points that TensorBoard has read."""

DRAW_MILLISECONDS = 20_000
"""Milliseconds for drawing the plots of a page."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
"""Names of the browser's executable."""


@contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """Run TensorBoard in this context and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--samples_per_plugin", "images=100", "--load_fast", "false"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        address = f"http://127.0.0.1:{port}/"
        try:
            wait_for(address)
            wait_until_read(address)
            yield address
        finally:
            server.terminate()


def wait_for(address: str) -> None:
    """Wait until the server at `address` answers. Raises TimeoutError after `PATIENCE` seconds."""
    until = time.monotonic() + ANSWER_TIMEOUT_SECONDS
    while time.monotonic() < until:
        try:
            with urlopen(address, timeout=ANSWER_TIMEOUT_SECONDS):
                return
        except URLError:
            time.sleep(0.5)
    raise TimeoutError(f"TensorBoard did not answer at {address} within {ANSWER_TIMEOUT_SECONDS:.0f} s")


def wait_until_read(address: str) -> None:
    """Wait until TensorBoard finds no more points, because it shows only points that it has read."""
    before = [-1]
    while (now := count_points(address)) != before:
        before = now
        time.sleep(POLL_SECONDS)


def count_points(address: str) -> list[int]:
    """Return the number of points of the objective in each run."""
    with urlopen(f"{address}data/plugin/scalars/tags", timeout=ANSWER_TIMEOUT_SECONDS) as answer:
        runs = [run for run, tags in json.loads(answer.read()).items() if OBJECTIVE in tags]
    found = []
    for run in runs:
        with urlopen(f"{address}data/plugin/scalars/scalars?{urlencode({'run': run, 'tag': OBJECTIVE})}") as answer:
            found.append(len(json.loads(answer.read())))
    return found


def take_screenshot(browser: Any, address: str, path: Path) -> None:
    """Save a screenshot of a page after its plots are drawn."""
    page = browser.new_page(viewport={"width": WINDOW[0], "height": WINDOW[1]})
    page.goto(address)
    page.wait_for_timeout(DRAW_MILLISECONDS)
    page.screenshot(path=path)
    page.close()


def main() -> None:
    """Take a screenshot of every tab."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logdir", type=Path, required=True, help="runs to show")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    args = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        parser.error(f"there is none of {', '.join(BROWSERS)} on this machine; install one")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        parser.error("the package playwright is missing; pip install playwright")
    args.out.mkdir(parents=True, exist_ok=True)
    options = {"executable_path": program, "args": ["--no-sandbox", "--enable-unsafe-swiftshader"]}
    with tensorboard(args.logdir) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(**options)
        for name, page in TABS.items():
            take_screenshot(browser, f"{address}{page}", args.out / f"{name}.png")
            print(f"{name}: {args.out / name}.png")


if __name__ == "__main__":
    main()
