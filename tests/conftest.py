"""What the whole suite needs of its process."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background with SIGINT ignored, and children inherit that: no Ctrl-C would ever arrive
    # in the tests that send one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
