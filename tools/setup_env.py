"""The door of the set-up: turns away Pythons that are too old; tools/environment.py does the work.

Every Python since 2.7 can parse this file; a newer interpreter on the PATH takes over by itself.
"""

from __future__ import print_function

import os
import subprocess
import sys

OLDEST = (3, 11)
# The version that the constraints were measured with comes first.
CANDIDATES = ("python3.11", "python3.12", "python3.13", "python3.14")


def newer_python(search_path):
    # type: (str) -> str
    """The first interpreter on search_path that is new enough and starts; "" if there is none."""
    question = "import sys; sys.exit(sys.version_info < %r)" % (OLDEST,)
    with open(os.devnull, "w") as nowhere:
        for name in CANDIDATES:
            for folder in search_path.split(os.pathsep):
                program = os.path.join(folder, name)
                # A version manager's stand-in may have no version behind it: start it to know.
                if os.access(program, os.X_OK) and not subprocess.call(
                    [program, "-c", question], stdout=nowhere, stderr=nowhere
                ):
                    return program
    return ""


def main():
    # type: () -> int
    """Run the set-up under a Python that can; one sentence and exit code 2 where there is none."""
    if sys.version_info < OLDEST:
        program = newer_python(os.environ.get("PATH", ""))
        if program:
            os.execv(program, [program, os.path.abspath(__file__)] + sys.argv[1:])
        sentence = (
            "Twinstep needs Python 3.11 or newer, but %s is %d.%d and no newer one is on the PATH: "
            "install one and name it with `make PYTHON=/path/to/python3`."
        )
        print(
            sentence % (sys.executable, sys.version_info[0], sys.version_info[1]), file=sys.stderr
        )
        return 2
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from tools import environment

    return environment.main()


if __name__ == "__main__":
    sys.exit(main())
