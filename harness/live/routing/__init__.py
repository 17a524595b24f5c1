"""The routing scheme of a lab's switches: applied, compared with what their kernels decide, and removed."""
