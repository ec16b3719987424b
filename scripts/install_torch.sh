#!/bin/sh
# Installs a CPU build of torch: scripts/install_torch.sh PYTHON VERSION [INDEX]
# On Linux the plain wheel of the package index needs gigabytes of CUDA libraries. There only a `+cpu`
# build will do: from a wheel that pip already finds, or from INDEX (an index of CPU wheels).
set -eu
python=$1 version=$2 index=${3:-}

case "$(uname -s)" in
    Linux) wanted="torch==$version+cpu" ;;
    *) wanted="torch==$version" ;; # elsewhere the plain wheel is the CPU build
esac

echo "make: installing $wanted"
if "$python" -m pip install -qq --no-compile --disable-pip-version-check ${index:+--extra-index-url "$index"} "$wanted"; then
    exit 0
fi
cat >&2 <<END
make: pip finds no CPU build of torch $version for this machine and this Python.
The plain wheel would pull gigabytes of CUDA libraries, so it is not taken. Either
  name an index of CPU wheels:       make demo TORCH_INDEX=URL   (see pytorch.org, "Get started", CPU)
  or bring the wheel in a folder:    PIP_FIND_LINKS=/path/to/folder make demo
  or take another version of torch:  make demo TORCH_VERSION=2.x.y
END
exit 1
