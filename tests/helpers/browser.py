"""A page in headless Chromium: a test's copy of it is driven by an appended script, which says what it sees."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: pages cannot be looked at")

# Heard from the first element on: what the policy refused, what a script threw, what was fetched.
_EARLY = """
window.heard = [];
addEventListener("securitypolicyviolation", (e) => heard.push("policy: " + e.violatedDirective + " " + e.blockedURI));
const failed = (e) => (e.target === window ? "error: " + e.message : "unloaded: " + e.target.tagName);
addEventListener("error", (e) => heard.push(failed(e)), true);
addEventListener("unhandledrejection", (e) => heard.push("rejected: " + e.reason));
"""

_LATE = """
(async () => {
  const told = {};
  const tick = () => new Promise((done) => setTimeout(done, 5));
  const width = (element) => element.scrollWidth;
  try { await (async () => { %s })(); } catch (error) { heard.push("driver: " + error); }
  await tick();
  told.heard = heard;
  told.fetched = performance.getEntriesByType("resource").map((e) => e.name).filter((n) => !n.startsWith("data:"));
  told.inner = innerWidth;
  told.width = document.documentElement.scrollWidth;
  parent.postMessage(JSON.stringify(told), "*");
})();
"""

# A frame is as narrow as a telephone; a window is not.
_FRAME = """<!doctype html><meta charset="utf-8"><pre id="told"></pre>
<script>addEventListener("message", (e) => { document.querySelector("#told").textContent = e.data; });</script>
<iframe src="%s" width="%d" height="%d" frameborder="0"></iframe>
"""


def drive(page, script, folder, *, size=(1280, 900)):
    """What ``script`` put into ``told``, with ``heard``, ``fetched``, ``inner`` and ``width`` (of the document)."""
    text = page.read_text(encoding="utf-8")
    late = _LATE % script
    allowed = " ".join(f"'sha256-{_digest(part)}'" for part in (_EARLY, late))
    assert text.count("script-src ") == 1
    text = text.replace("script-src ", f"script-src {allowed} ")
    text = text.replace("<title>", f"<script>{_EARLY}</script><title>", 1)
    text = text.replace("</body>", f"<script>{late}</script></body>")
    copy = folder / "driven.html"
    copy.write_text(text, encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(_FRAME % (copy.name, *size), encoding="utf-8")
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=4000",
        "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    console = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="told">(.+?)</pre>', done.stdout.decode("utf-8"), re.DOTALL)
    assert found, "the driver did not come to its end"
    return {**json.loads(html.unescape(found[1])), "console": console}


def _digest(text):
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
