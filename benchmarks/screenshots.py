"""Pictures of TensorBoard's tabs for docs/telemetry.md, taken by a headless Chromium from runs that there are.

    python -m benchmarks.screenshots --logdir runs/digits --out docs/tensorboard

Needs Chromium on the machine (Debian: `apt-get install chromium`).
"""

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

TABS = {
    "scalars": "?tagFilter=rollout%2F(obj|acc|fos|op)|train%2F(kl|expl|entropy)&smoothing=0#timeseries",
    "custom_scalars": "?smoothing=0#custom_scalars",
    "images": "#images",
    "hparams": "#hparams",
}
"""File name, and where its page is."""

WINDOW = (1500, 1250)
"""Pixels."""

PATIENCE = 60.0
"""Seconds that TensorBoard may take to answer."""

SETTLED = 60_000
"""Milliseconds of the page's own time in which its plots are drawn."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """Its address, while it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--samples_per_plugin", "images=100", "--load_fast", "false"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        address = f"http://127.0.0.1:{port}/"
        try:
            wait_for(address)
            yield address
        finally:
            server.terminate()


def wait_for(address: str) -> None:
    """Until somebody answers. Raises TimeoutError if nobody does."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            with urlopen(address, timeout=PATIENCE):
                return
        except URLError:
            time.sleep(0.5)
    raise TimeoutError(f"TensorBoard did not answer at {address} within {PATIENCE:.0f} s")


def take(browser: str, address: str, path: Path) -> None:
    """A picture of a page that has been drawn."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--enable-unsafe-swiftshader", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={WINDOW[0]},{WINDOW[1]}"]
        command += [f"--virtual-time-budget={SETTLED}", f"--screenshot={path.resolve()}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def main() -> None:
    """Takes a picture of every tab."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logdir", type=Path, required=True, help="runs to show")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.error(f"there is none of {', '.join(BROWSERS)} on this machine; install one")
    args.out.mkdir(parents=True, exist_ok=True)
    with tensorboard(args.logdir) as address:
        for name, page in TABS.items():
            take(browser, f"{address}{page}", args.out / f"{name}.png")
            print(f"{name}: {args.out / name}.png")


if __name__ == "__main__":
    main()
