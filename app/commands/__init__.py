"""What `evenhand VERB` does, a file a verb. `app.cli` knows the options and chooses."""
