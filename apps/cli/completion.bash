# Completion for bash of cf-golden, cf-layer, cf-model and cf-op. The program says which words fit: commands, options,
# presets and other values. Where none does, bash completes files.
_cf_ops() {
  local word=${COMP_WORDS[COMP_CWORD]#=}
  mapfile -t COMPREPLY < <(compgen -W "$("$1" --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "$word")
}
complete -o default -F _cf_ops cf-golden cf-layer cf-model cf-op
