"""The command that measures what a fabric carries when all RNICs send at once: bisection."""

from __future__ import annotations

import click
import msgspec

from faultbed.harness.cli.context import COLOURS, Session, json_option, pass_session, styled
from faultbed.harness.cli.options.numbers import FiniteRange, parse_duration
from faultbed.harness.cli.traffic.flows_and_collectives import read_size
from faultbed.harness.confidence import LEVEL
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing.fit_routing import require_scheme
from faultbed.harness.run import bisection_run
from faultbed.harness.run.bisection_run import Bisection, BisectionSpec
from faultbed.harness.verdict import Verdict, exit_code, worst
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import open_lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.routing.schemes import SCHEMES
from faultbed.testbed.tenancy import dirty
from faultbed.testbed.tenancy.lab_lease import hold
from faultbed.traffic.flows.permutations import TIERS, Tier, tiers_of

__all__ = ["COMMANDS"]


@click.command()
@click.option(
    "--permutations",
    default=9,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Random permutations per tier; fewer than 8 decide nothing, 9 decide up to four tiers.",
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(min=0), help="Seed of the permutations.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(TIERS),
    help="Tier to measure; repeatable. Default: every tier of the lab.",
)
@click.option("--qps", default=16, show_default=True, type=click.IntRange(1), help="Queue pairs per flow.")
@click.option("--size", default="16KiB", show_default=True, help="Message size.")
@click.option(
    "--for",
    "duration",
    default="10s",
    show_default=True,
    metavar="TIME",
    help="Duration of each permutation; the flow alone runs half as long.",
)
@click.option(
    "--routing",
    "scheme",
    type=click.Choice(tuple(SCHEMES)),
    help="Routing scheme that the switches apply meanwhile, as [fabric] of an experiment does. Default: BGP's ECMP.",
)
@click.option("--min", "least", type=FiniteRange(0), help="FAIL a tier whose whole interval lies below this value.")
@json_option
@pass_session
def bisection(
    session: Session,
    *,
    permutations: int,
    seed: int,
    tiers: tuple[str, ...],
    qps: int,
    size: str,
    duration: str,
    scheme: str | None,
    least: float | None,
    as_json: bool,
) -> int:
    """Measure effective bisection: goodput of a random permutation of all RNICs, relative to one flow alone.

    In a permutation each RNIC sends to another one, all at once. Effective bisection is their total goodput ÷ (number
    of flows x goodput of one flow alone), for each tier that the flows cross: within racks, across racks of a zone,
    across zones. 1 is full bisection. The median over all permutations counts, with an interval by a sign test.
    Without --min, a tier with an interval is a PASS. A soft lab is reset to its snapshot first. It is INCONCLUSIVE if
    its links have no rates, or if the load may exceed half of what its emulation can carry, because then the machine
    limits the flows.

    With --routing, the kernels' decisions and the packets of their ports must show that the switches routed by the
    scheme; otherwise every tier is INCONCLUSIVE.
    """
    inventory = session.inventory()
    fabric = None if scheme is None else Fabric(routing=scheme)
    if fabric is not None:
        require_scheme(fabric, inventory.topology, inventory.kind, "--routing")
    spec = BisectionSpec(
        tiers=_tiers(inventory, tiers), permutations=permutations, seed=seed, seconds=parse_duration(duration), qps=qps,
        message_bytes=read_size(size), least=least, fabric=fabric,
    )  # fmt: skip
    if not bisection_run.has_rates(inventory):
        why = (
            f"the links of {inventory.name} have no rates, so that this machine decides what flows get; use a lab with "
            "faultbed_rate_scale, such as soft-zones"
        )
        results = tuple(
            bisection_run.judge_tier(tier, (), None, least=least, limit=why, level=LEVEL) for tier in spec.tiers
        )
        return _end(session, inventory, Bisection(tiers=results), as_json=as_json)
    backend, traits = backend_of(inventory.kind), traits_of(inventory.kind)
    names = [] if traits.has_snapshot else [host.name for host in inventory.topology.hosts]
    with (
        hold(inventory, names, why="bisection", mode="exclusive") as holding,
        session.progress(also=holding.heartbeat) as progress,
    ):
        backend.make_ready(inventory, progress)
        backend.reset(inventory, progress)
        with open_lab(inventory) as lab:
            lab.guard = holding.refresh
            if not traits.has_snapshot:
                lab.reserved = holding.covers
            dirty.refuse(lab.state_dir, lab.name)
            result = bisection_run.measure(lab, spec, progress)
    return _end(session, inventory, result, as_json=as_json)


def _tiers(inventory: Inventory, names: tuple[str, ...]) -> tuple[Tier, ...]:
    """Return the tiers to be measured, in their order.

    Raises:
        UsageError: the lab has none, or not one that was named.
    """
    crossed = tiers_of(inventory.topology)
    if missing := [name for name in names if name not in crossed]:
        has = f"it has {', '.join(crossed)}" if crossed else "it has none"
        raise UsageError(f"--tier {missing[0]}: no permutation of all RNICs of {inventory.name} crosses it; {has}")
    if not crossed:
        raise UsageError(f"{inventory.name}: a permutation needs at least two hosts with as many RNICs")
    return tuple(tier for tier in crossed if not names or tier in names)


def _end(session: Session, inventory: Inventory, result: Bisection, *, as_json: bool) -> int:
    """Print the result, and return the exit code."""
    tiers, lab_state = result.tiers, result.lab_state
    verdict = worst(tier.verdict for tier in tiers)
    if lab_state == "DIRTY":  # a lab in an unknown state proves nothing
        verdict = worst((verdict, Verdict.INCONCLUSIVE))
    code = exit_code(verdict, lab_state or "CLEAN")
    if as_json:
        session.json(
            {
                "lab": inventory.name,
                "verdict": str(verdict),
                "lab_state": lab_state,
                "routing": None if result.routing is None else msgspec.to_builtins(result.routing),
                "tiers": [tier.to_dict() for tier in tiers],
            }
        )
        return code
    level = max((tier.interval.level for tier in tiers if tier.interval is not None), default=LEVEL)
    session.table(
        ("tier", "flows", "", "effective bisection", f"{100 * level:.5g} % interval", "uplinks used", "why"),
        [
            (
                tier.tier,
                str(tier.flows or ""),
                styled(str(tier.verdict), COLOURS[tier.verdict]),
                "" if tier.value is None else f"{tier.value:.3f}",
                "" if tier.interval is None else f"{tier.interval.low:.3f} .. {tier.interval.high:.3f}",
                "" if tier.utilisation is None else f"{tier.utilisation:.2f}",
                tier.detail if tier.verdict is not Verdict.PASS else "",
            )
            for tier in tiers
        ],
    )
    if (receipt := result.routing) is not None and not receipt.unproven:
        session.out.print(
            f"routing scheme {receipt.scheme} ({receipt.fidelity}): the kernels agree in {receipt.decisions.agreed} of "
            f"{receipt.decisions.queried} decisions, {receipt.carried_packets} packets left by ports among which it "
            "chooses; it was removed"
        )
    session.out.print("the lab was not used" if lab_state is None else f"lab {lab_state}")
    return code


COMMANDS = (bisection,)
