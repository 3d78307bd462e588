"""The blocks that SympFormer is compared with: they have no Hamiltonian."""
