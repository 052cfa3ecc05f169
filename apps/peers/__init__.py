"""What bench_peers.py times beside this library, a file a peer, and what these files share. Importing one needs neither
torch nor triton."""
