# Sourced by scripts that hand on weights and answers, in pieces of 15 MiB: some machines give back no file above 16.

pieces() { # file, arguments of tar: its .00, .01 and so on, which are replaced when all are written
    local file=$1 piece
    shift
    rm -f "$file".new.* # of a call that was cut off
    tar -cz "$@" | split -b 15M -d - "$file.new."
    # 1 says that a file changed meanwhile, which is fine; beyond, pieces of before stay.
    [ "${PIPESTATUS[0]}" -lt 2 ] || { rm -f "$file".new.*; return 1; }
    rm -f "$file".[0-9][0-9]
    for piece in "$file".new.*; do mv "$piece" "$file.${piece##*.}"; done
}

pack_models() { # where to, then arguments of tar: models.tar, by xz where there is one
    local to=$1
    shift
    rm -rf "$work/packed" && mkdir -p "$work/packed" "$to"
    if command -v xz >/dev/null; then
        tar -cf - "$@" | xz -1 -T4 | split -b 15M -d - "$work/packed/models.tar.xz."
    else
        tar -cf - "$@" | split -b 15M -d - "$work/packed/models.tar."
    fi
    rm -f "$to"/models.tar.*
    mv "$work"/packed/models.tar.* "$to/"
}

unpack() { # folder with models.tar in pieces, where to
    mkdir -p "$2"
    if ls "$1"/models.tar.xz.* >/dev/null 2>&1; then
        cat "$1"/models.tar.xz.* | xz -dc | tar -x -C "$2"
    else
        cat "$1"/models.tar.* | tar -x -C "$2"
    fi
}
