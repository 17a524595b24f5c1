"""The kinds of labs: soft labs of VMs on one machine, and racks."""
