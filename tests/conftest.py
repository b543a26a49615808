"""Markers, the import path, and the promise that no test opens a socket to another machine."""
import os
import pathlib
import socket
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)      # the models of the tests are tiny: a second thread only costs

MARKERS = {"slow": "takes more than a few seconds: run with --slow",
           "gpu": "needs a CUDA device",
           "hf": "needs transformers"}


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the slow tests")


def pytest_configure(config):
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: give --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if "hf" in item.keywords:
            try:
                import transformers  # noqa: F401
            except ImportError:
                item.add_marker(pytest.mark.skip(reason="transformers is not installed"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Anything but loopback and local sockets is refused: the tests run offline, provably."""
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach {address}")
        return connect(self, address)
    monkeypatch.setattr(socket.socket, "connect", guarded)
