"""What all tests start from: what they start heeds the signals of a terminal, and what they fork collects no garbage."""

import gc
import os
import signal

# Whoever runs the suite in the background (nohup, a shell's &) has these ignored, and all that is started would ignore
# them, too. A handler that does nothing keeps the suite running all the same, but is not inherited.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# A test may leave an object of grpc.aio behind. Whoever collects the last one waits for grpc's thread to end, which a
# forked child does not have: it would wait for ever, at full speed.
os.register_at_fork(after_in_child=gc.disable)
