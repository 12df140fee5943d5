"""Starting and watching ranks: rendezvous, devices, hosts, scripts for torchrun and SLURM."""
