#!/bin/sh
# tools/setup_env.py under the named Python. Where none was named, so without --insist, and the default
# one is too old, under a newer one of the PATH.
#   tools/setup.sh PYTHON [options of tools/setup_env.py]
named=$1
shift
if ! command -v "$named" >/dev/null 2>&1; then
	echo "${named:-PYTHON, which is empty,} is not on the PATH: install Python 3.11 or newer," \
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
case " $* " in
*" --insist "*) remedy="name this one with make PYTHON=$newer" ;;
*) [ -n "$newer" ] && exec "$newer" "$script" "$@" ;;
esac
[ -n "$newer" ] || remedy="no newer one is on the PATH, install one and name it with make PYTHON=/path/to/python3"
version=$("$named" -c 'import platform; print(platform.python_version())' 2>/dev/null)
echo "Twinstep needs Python 3.11 or newer, but $named is ${version:-no Python that starts}: $remedy." >&2
exit 2
