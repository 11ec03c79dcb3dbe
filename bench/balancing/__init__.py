"""How well a strategy balances, against a dispatcher that knows everything; see `bench/balance.py`."""
