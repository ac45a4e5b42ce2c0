"""Looking at a run: its clients, its gap, the constants of its theorems; while it trains, or afterwards."""
