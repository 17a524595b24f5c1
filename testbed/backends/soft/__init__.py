"""The soft lab: real RoCE on one machine. QEMU VMs with `rdma_rxe`, and one VM whose namespaces are the switches.

recipe, image   what a guest is, and building it once      qmp, vm     one QEMU process
accel           KVM where it really works, else TCG        wiring      which VM has which NIC, from the inventory
keys            SSH keys of one lab                        lifecycle   up, down, reset, status of a whole lab
"""
