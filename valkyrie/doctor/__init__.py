"""`valkyrie-doctor`: checks the machine, software, disks and processes before a large run, and makes a dry run."""
