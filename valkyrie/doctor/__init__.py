"""`valkyrie-doctor`: checks of the machine, software, disks, other processes and a dry run, before a big run."""
