"""The launcher with less patience for a leader that does not answer: impatient.py SECONDS ARGUMENTS...

What takes ten seconds otherwise, a test does not have to wait for.
"""

import sys

from elastic_adapter.core import agent
from elastic_adapter.launchers.cli import main

if __name__ == "__main__":
    agent._UNANSWERED_S = float(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
