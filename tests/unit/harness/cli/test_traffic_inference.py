"""`faultbed traffic inference`: what the clocks of two hosts leave open is neither a PASS nor a FAIL."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.main import cli
from faultbed.harness.cli.traffic import serving
from faultbed.harness.verdict import ExitCode
from faultbed.traffic.workloads.inference import InferenceResult, InferenceSpec

MS = 1_000_000


def result(ttft_ms, kept, error_ms):
    """An inference job whose requests had these times to first token, on clocks of which one may be wrong."""
    return InferenceResult(
        outcome="completed", where=None, ranks=("host1:rxe0", "host2:rxe0"), iterations=((), ()), wrong_elements=0,
        flights=(), samples=(), connections=(), qp_errors=(), rebuilds=(),
        clock_error_ns={"host1": error_ms * MS, "host2": 0},
        spec=InferenceSpec(requests=len(ttft_ms), slo_ttft_ms=1000), requests_completed=len(ttft_ms),
        ttft_ns=tuple(ms * MS for ms in ttft_ms), tpot_ns=((MS,),) * len(ttft_ms),
        ttft_p50_ns=0, ttft_p99_ns=0, tpot_p50_ns=0, tpot_p95_ns=0, tpot_p99_ns=0, slo_attainment=kept,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ttft_ms", "error_ms", "kept", "code"),
    [
        ((500, 990), 1, 1.0, ExitCode.PASS),
        ((500, 990), 10, 1.0, ExitCode.INCONCLUSIVE),
        ((500, 1010), 10, 0.5, ExitCode.INCONCLUSIVE),
        ((500, 1010), 1, 0.5, ExitCode.FAIL),
        ((3000, 1010), 10, 0.0, ExitCode.FAIL),
    ],
)
def test_inference_command_decides_no_slo_share_that_the_clocks_leave_open(monkeypatch, ttft_ms, error_ms, kept, code):
    monkeypatch.setattr(serving, "_run", lambda *_: result(ttft_ms, kept, error_ms))
    done = CliRunner().invoke(cli, ["traffic", "inference", "--slo-ttft", "1s"], standalone_mode=False)
    assert done.return_value == code, done.output
    assert ("within the error of two hosts' clocks" in done.output) is (code == ExitCode.INCONCLUSIVE)


def test_inference_command_without_an_objective_claims_none_was_kept(monkeypatch):
    """It printed that 100 % of the requests kept the SLO."""
    whole = result((500, 990), 1.0, 0)
    without = dataclasses.replace(whole, spec=dataclasses.replace(whole.spec, slo_ttft_ms=0.0))
    for given, shown, share in ((without, "no SLO", None), (whole, "100.0%", 1.0)):
        monkeypatch.setattr(serving, "_run", lambda *_, given=given: given)
        done = CliRunner().invoke(cli, ["traffic", "inference"], standalone_mode=False)
        assert shown in done.output
        done = CliRunner().invoke(cli, ["traffic", "inference", "--json"], standalone_mode=False)
        assert json.loads(done.output)["slo_attainment"] == share
