"""What the processes of a deployment agree on: how long an end may take, which signals stop, who says "ready".

Apart from the worker's code, so that who only starts workers need not import a server.
"""

from __future__ import annotations

import signal

# The app ends its streams a second before its deadline, so that is a second later than the grace time.
LAST_WORDS_S = 1.0
CANCEL_WAIT_S = 1.0  # for what cancelled requests do in their `finally`
LIFESPAN_SHUTDOWN_S = 5.0
# What the master must wait beyond the grace time so that it never kills a worker that keeps its own deadline.
MASTER_MARGIN_S = LAST_WORDS_S + CANCEL_WAIT_S + LIFESPAN_SHUTDOWN_S + 2.0

STOP_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT)  # blocked by the master over the fork
READY_FD_VARIABLE = "EVENHAND_READY_FD"
