"""What `evenhand check` looks at: each module gathers facts of one part, and judges them by rules that do no I/O."""
