"""What a job costs before it runs: FLOPs, memory, communication."""
