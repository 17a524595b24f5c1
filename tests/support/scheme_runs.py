"""Runs of an all-to-all under a routing scheme on a soft lab, and what their uplinks carried."""

from faultbed.harness.experiment import experiment_file
from faultbed.harness.run import loop
from faultbed.testbed.observe import switch_routing

_TEXT = """
name = "scheme"
[fabric]
routing = "{scheme}"
{fabric}
[workload]
collective = "all-to-all"
size = "{size}"
ranks = [{ranks}]
{length}
{workload}
[workload.qp]
timeout = {timeout}
{qp}
[[expect]]
metric = "wrong_elements"
max = 0
"""
"""With an ACK timeout of 1.1 s (18): on a busy machine the usual 67 ms send packets again that are not lost."""


def run(lab, tmp_path, scheme, hosts=(1, 2, 3, 4), *, more="", iterations=8, words=None, **options):
    """Run an all-to-all under a routing scheme. `words` are sizes, timeouts and further lines of the experiment."""
    ranks = ", ".join(f'"host{number}:rxe0"' for number in hosts)
    usual = {"size": "256KiB", "timeout": 18, "fabric": "", "workload": "", "qp": ""}
    length = {"length": f"iterations = {iterations}"}
    text = _TEXT.format(scheme=scheme, ranks=ranks, **usual | length | (words or {})) + more
    experiment = experiment_file.decode(text.encode(), source="scheme.toml")
    resolved = loop.resolve(experiment, text.encode(), lab.inventory_model)
    finished = loop.execute(resolved, lab.inventory_model, out=tmp_path, **{"progress": print} | options)
    lab.forget_connections()
    return finished


def rules(lab):
    """Return the rules of schemes on each switch."""
    return {name: one["rules"] for name, one in switch_routing.read(lab, lab.topology.switch_by_name).switches.items()}


def mmr(finished, switch):
    """Return the maximum over the mean of the bytes that a switch sent up, by its ports' counters."""
    measured = finished.run_dir.read_run()
    before, after = measured.telemetry.counters_before[switch], measured.telemetry.counters_after[switch]
    sent = [after[f"{port}.tx_bytes"] - before[f"{port}.tx_bytes"] for port in ("ctsw1", "ctsw2")]
    return max(sent) * len(sent) / sum(sent)
