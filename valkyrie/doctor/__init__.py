"""What is looked at before the first big run: the machine, the software, the disks, the other processes, a dry run."""
