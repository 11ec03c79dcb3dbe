"""What the commands that look at a running deployment share: how they reach it, and how they show it."""
