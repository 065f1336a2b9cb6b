"""Starting a training where it is to run: several processes of this machine, other hosts, a slice that is rented.

`local` starts and watches processes; the other modules are functions from options and the training's arguments to the
commands of ssh, Slurm, Google Cloud, GKE and SkyPilot, which schedule what one machine cannot hold.
"""
