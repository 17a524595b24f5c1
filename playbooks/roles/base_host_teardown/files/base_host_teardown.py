"""Put back what the role base_host found: sysctls, and files that were there or were not."""

from faultbed_found import Found
from faultbed_state import answer


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_put_back, wanted, check=check)


def _put_back(_wanted, changes):
    return {"put_back": Found("base_host", changes).put_back()}
