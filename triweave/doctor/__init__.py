"""What is wrong with the machines of a job, before the job runs on them.

findings       what is wrong, and its cure
seen           what one rank sees of its host, its GPU and its settings
look           reads it
wanted         what a run asks of its machines
judge          what is wrong with what the ranks see: pure
measure        bandwidth and latency of groups and pairs, speed of ranks, clocks
judge_measured what is wrong with what was measured: pure
run            one rank of a doctor's visit
table          the page that a person reads
"""
