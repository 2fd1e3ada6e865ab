#!/bin/sh
# tools/setup_env.py under the named Python or, if that is too old, under a newer one of the PATH.
#   tools/setup.sh PYTHON [options of tools/setup_env.py]
named=$1
shift
if ! command -v "$named" >/dev/null 2>&1; then
	echo "$named is not on the PATH: install Python 3.11 or newer," \
		"or name one with make PYTHON=/path/to/python3." >&2
	exit 2
fi

# A version manager's stand-in may have no version to start: start it to know.
new_enough() {
	"$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

script=${0%/*}/setup_env.py
new_enough "$named" && exec "$named" "$script" "$@"
newer=$(
	IFS=:
	# The version that the constraints were measured with comes first.
	for name in python3.11 python3.12 python3.13 python3.14; do
		for folder in $PATH; do
			new_enough "$folder/$name" && echo "$folder/$name" && exit
		done
	done
)
[ -n "$newer" ] && exec "$newer" "$script" "$@"
version=$("$named" -c 'import platform; print(platform.python_version())' 2>/dev/null)
echo "Twinstep needs Python 3.11 or newer, but $named is ${version:-no Python that starts} and no newer" \
	"one is on the PATH: install one and name it with make PYTHON=/path/to/python3." >&2
exit 2
