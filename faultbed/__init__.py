"""faultbed: a RoCE fabric testbed and fault-injection harness for AI back-end networks.

The import package. Its four parts are links to the folders beside it, so that a checkout and an installation have the
same module names. Imports only go down:

    faultbed.harness     experiment, plan, run, verdict, report; the command line; the pytest plugin
    faultbed.traffic     workloads: collectives, flows, jobs, traces; the pyverbs engine  } never import
    faultbed.inject      faults: kinds, mechanisms, holders, leases, receipts             } each other
    faultbed.testbed     the lab: model, inventory, back ends, SSH, provisioning, counters, routing

Data beside them: `playbooks`, `inventory` and `experiments` (`faultbed.testbed.shipped` finds them).
"""

import os

__all__ = ["__version__"]

__version__ = "0.1.0"

# Git writes a link as a text file where it may not make links (core.symlinks=false, an unpacked zip archive).
if os.path.isfile(os.path.join(os.path.dirname(__file__), "testbed")):  # noqa: PTH113, PTH118, PTH120 - nodes import this file, and pathlib costs them a second
    raise ImportError(
        f"{os.path.dirname(__file__)}: this copy of faultbed has no symbolic links, which its package consists of; "  # noqa: PTH120
        "clone it with `git clone -c core.symlinks=true`, or install a wheel"
    )
