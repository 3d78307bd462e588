class States: pass
