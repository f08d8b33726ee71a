"""The site as mkdocs builds it, in a browser: its own search finds the page that answers a user's question."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.support.browser import Page, browser_page
from tests.support.paths import ROOT

QUESTIONS = {
    "conda env": {"environments"},
    "module load": {"environments"},
    "different python on nodes": {"environments", "ssh"},
    "use 4 of 8 GPUs": {"gpus"},
    "GPU utilisation": {"gpus"},
    "submit from notebook": {"python"},
    "lightning": {"frameworks"},
    "deepspeed": {"frameworks"},
    "NCCL_SOCKET_IFNAME": {"slurm", "reference/environment"},
    "wandb": {"trackers"},
    "resume after time limit": {"restarts"},
    "job array": {"sweeps"},
    "gres": {"gpus", "slurm"},
    "two nodes hang": {"failures"},
    "container": {"slurm"},
    "port already in use": {"faq"},
    "download dataset no internet": {"data"},
    "uninstall": {"install"},
    "cancel everything": {"cleanup"},
    "GPU hours": {"results"},
    "pdb": {"debug"},
    "install": {"install"},
    "CUDA out of memory": {"faq"},
    "stop a run": {"restarts", "cleanup"},
    "sbatch script unchanged": {"slurm"},
    "WANDB_API_KEY": {"trackers"},
    "copy results back": {"ssh", "data"},
    "save a checkpoint": {"entry", "restarts"},
    "disk space": {"cleanup"},
    "host key": {"ssh"},
}
"""What a user types -> the pages that answer it; one of them has to be among the first three."""
_SEARCH = """(async query => {
  const input = document.querySelector(".md-search__input");
  const shown = () => document.querySelector(".md-search-result__meta").textContent.trim();
  const typed = async text => {
    input.focus(); input.value = text; input.dispatchEvent(new KeyboardEvent("keyup"));
    for (let i = 0; i < 200; i++) {
      await new Promise(done => setTimeout(done, 50));
      if (text ? /document/.test(shown()) : /^Type/.test(shown())) return;
    }
  };
  await typed(""); await typed(query);
  await new Promise(done => setTimeout(done, 100));
  const links = [...document.querySelectorAll(".md-search-result__item")].slice(0, 3);
  return links.map(item => new URL(item.querySelector("a").href).pathname.replace(/^\\/|\\/$/g, ""));
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Build the site, serve it on the loopback, and open it."""
    built = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(built))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with browser_page(tmp_path_factory.mktemp("browser")) as page:
                page.open(f"http://127.0.0.1:{server.server_port}/")
                yield page
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name is http.server's)
        pass


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds_the_answer_among_its_first_three(question: str, site: Page) -> None:
    found = site.evaluate(f"{_SEARCH}({question!r})")
    assert QUESTIONS[question] & set(found), found
