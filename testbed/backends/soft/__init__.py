"""The soft lab: real RoCE on one machine. QEMU VMs with `rdma_rxe`, and one VM whose namespaces are the switches.

image        the guest, built once                 qmp_client, vm   one QEMU process
accel        KVM where it works, else TCG          wiring           which VM has which NIC, from the inventory
ssh_access   keys, user and addresses of one lab   lifecycle        up, down, reset, status of a whole lab
"""
