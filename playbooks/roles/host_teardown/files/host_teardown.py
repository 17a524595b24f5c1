"""Put back what the roles of rack labs found: tools' settings, sysctls, and files that were there or were not."""

import os

from faultbed_found import FOLDER, Found
from faultbed_state import answer


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_put_back, wanted, check=check)


def _put_back(_wanted, changes):
    roles = sorted(name.removesuffix(".json") for name in os.listdir(FOLDER)) if os.path.isdir(FOLDER) else []
    return {"put_back": {role: Found(role, changes).put_back() for role in roles if not role.endswith(".new")}}
