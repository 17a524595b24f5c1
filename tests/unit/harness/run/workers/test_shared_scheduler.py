"""Workers that an operator has started for a scheduler of Dask: `faultbed worker`, `--on tls://…`."""

import contextlib
import os
import re
import subprocess
import sys
import threading

import cloudpickle
import pytest
from click.testing import CliRunner
from distributed import Security
from house import HOUSE

from faultbed.harness.cli.main import cli
from faultbed.harness.run.workers import open_pool as opening
from faultbed.harness.run.workers.open_pool import open_pool
from faultbed.harness.run.workers.worker_places import parse_place
from faultbed.testbed.errors import UsageError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def files(tmp_path):
    """Return options with the paths of a certificate and its key, as Dask's commands take them."""
    security = Security.temporary()
    (tmp_path / "cert.pem").write_text(security.tls_client_cert)
    (tmp_path / "key.pem").write_text(security.tls_client_key)
    return {"--tls-ca-file": tmp_path / "cert.pem", "--tls-cert": tmp_path / "cert.pem",
            "--tls-key": tmp_path / "key.pem"}  # fmt: skip


@contextlib.contextmanager
def started(*words, env=None):
    with subprocess.Popen(
        [sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True, cwd=HOUSE, env=env
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            for _ in process.stderr:
                pass


@contextlib.contextmanager
def scheduler(files):
    words = [str(word) for option in files.items() for word in option]
    dask = ["distributed.cli.dask_scheduler", "--protocol", "tls", "--host", "127.0.0.1", "--port", "0"]
    with started(*dask, "--no-dashboard", *words) as process:
        for line in process.stderr:
            if match := re.search(r"Scheduler at:\s+(tls://\S+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield match[1]
                return


def settings(files):
    return opening.dask.config.set(
        {
            "distributed.comm.tls.ca-file": str(files["--tls-ca-file"]),
            "distributed.comm.tls.client.cert": str(files["--tls-cert"]),
            "distributed.comm.tls.client.key": str(files["--tls-key"]),
        }
    )


def opened(address, tmp_path):
    return open_pool(parse_place(address), inventory=None, runs=tmp_path / "runs", progress=print)


@pytest.mark.process
def test_scheduler_of_an_operator_gives_runs_to_its_workers(files, tmp_path):
    words = [str(word) for option in files.items() for word in option]
    with scheduler(files) as address, settings(files):
        with pytest.raises(UsageError, match="no worker with a lab; start `faultbed worker"), opened(address, tmp_path):
            pass
        environment = os.environ | {"FAULTBED_HOME": str(tmp_path / "state")}
        with started("faultbed.harness.console", "worker", address, "--no-lab", *words, env=environment):
            results = {}
            for _ in range(600):  # the worker is starting
                with contextlib.suppress(UsageError), opened(address, tmp_path) as pool:
                    results = dict(pool.map(abs, [-1, -2]))
                    break
            assert results == {-1: 1, -2: 2}


def test_scheduler_without_certificates_is_refused_before_a_connection(tmp_path):
    message = "its TLS file ca-file: is not set; set DASK_DISTRIBUTED__COMM__TLS__CA_FILE"
    with pytest.raises(UsageError, match=message), opened("tls://127.0.0.1:1", tmp_path):
        pass


def test_scheduler_that_does_not_answer_is_refused(files, monkeypatch, tmp_path):
    monkeypatch.setattr("faultbed.harness.run.workers.worker_pool._CONNECT_S", 0.5)
    with (
        settings(files),
        pytest.raises(UsageError, match=r"--on tls://127\.0\.0\.1:1: "),
        opened("tls://127.0.0.1:1", tmp_path),
    ):
        pass


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:1", "local:2", "127.0.0.1:1"])
def test_worker_refuses_what_is_no_tls_scheduler(text):
    done = CliRunner().invoke(cli, ["worker", text], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
