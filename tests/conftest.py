"""What all tests start from: what they start heeds the signals of a terminal, as a user's launcher does."""

import signal

# Whoever runs the suite in the background (nohup, a shell's &) has these ignored, and all that is started would ignore
# them, too. A handler that does nothing keeps the suite running all the same, but is not inherited.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
