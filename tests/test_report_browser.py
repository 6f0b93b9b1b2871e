"""The page in a browser: it draws, follows the pointer, and reports no error. Needs Debian's `chromium`."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flextensor_fx.report_html import report_to_html
from reports import model_report

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")

# Runs after the page's own scripts. Zoomed in, it looks for the colours of what is drawn; then, with the whole call in view, it
# uses the page as a reader would, and notes what came of it.
PROBE = """
<script>
const press = (id) => document.getElementById(id).click();
addEventListener("load", () => { for (let n = 0; n < 8; n++) press("in"); setTimeout(probe, 500); });
function probe() {
  const canvas = document.getElementById("timeline-0"), box = canvas.getBoundingClientRect(), found = {};
  const css = getComputedStyle(document.documentElement);
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color) => { pen.fillStyle = color; pen.fillRect(0, 0, 1, 1); return pen.getImageData(0, 0, 1, 1).data.join(); };
  const seen = new Set(), pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < pixels.length; i += 4) seen.add(pixels.slice(i, i + 4).join());
  for (const name of ["transfer", "compute", "stall", "resident", "streamed", "budget"])
    found[name] = seen.has(rgb(css.getPropertyValue("--" + name).trim()));
  press("all");
  const send = (type, x, y) => canvas.dispatchEvent(
    new PointerEvent(type, { clientX: box.left + x, clientY: box.top + y, pointerId: 1 }));
  canvas.setPointerCapture = () => {};
  send("pointermove", 82.2, 15);
  found.tip = document.getElementById("tip").textContent;
  send("pointerdown", 82.2, 15); send("pointerup", 82.2, 15);
  found.chosen = document.querySelector("#units tr.chosen")?.cells[0].textContent;
  const input = document.getElementById("filter");
  input.value = "layers.1"; input.dispatchEvent(new Event("input"));
  found.rows = [...document.querySelectorAll("#units tbody tr")].filter((row) => !row.hidden).length;
  document.querySelector("#units th[data-column='5'] button").click();
  found.first = document.querySelector("#units tbody tr").cells[5].textContent;
  found.background = getComputedStyle(document.body).backgroundColor;
  document.body.dataset.found = JSON.stringify(found);
}
</script>
"""


def browse(folder: Path, *flags: str) -> str:
    """Opens folder/page.html; what the browser printed."""
    assert CHROMIUM is not None
    common = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"
    command = [CHROMIUM, *common.split(), "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
               f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", *flags,
               (folder / "page.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("units", "scheme"), [(100, "light"), (1000, "dark")])
def test_the_page_draws_and_answers(tmp_path: Path, units: int, scheme: str):
    made = model_report(units)
    (tmp_path / "page.html").write_text(report_to_html(made).replace("</body>", PROBE + "</body>"))
    text = browse(tmp_path, "--dump-dom", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}")
    note = re.search(r'data-found="([^"]*)"', text)
    assert note is not None
    found: dict[str, Any] = json.loads(html.unescape(note[1]))
    assert all(found[name] for name in ("transfer", "compute", "stall", "resident", "streamed", "budget"))
    assert found["tip"].startswith("transfer ") and "model.layers.0." in found["tip"] and "memory " in found["tip"]
    assert found["chosen"] == "model.layers.0"
    assert found["rows"] == sum("layers.1" in unit.path for unit in made.units)
    assert float(found["first"]) == round(max(t.compute_ms for t in made.timelines[0].by_unit().values()), 3)
    light = sum(map(int, re.findall(r"\d+", found["background"])[:3])) > 3 * 128
    assert light == (scheme == "light")


@pytest.mark.slow
def test_a_screenshot(tmp_path: Path):
    model_report(100).save(tmp_path / "page.html")
    browse(tmp_path, "--window-size=1360,1500", f"--screenshot={tmp_path / 'page.png'}")
    png = (tmp_path / "page.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 50_000  # an empty page of this size takes some 10 kB
