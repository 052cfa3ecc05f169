# What of cuda needs no CUDA: the kernels' plans, and the choice among kernels. cf_cuda has these sources, and so do
# programs without CUDA that print plans: there no_kernels.cpp stands for the launches.
set(CF_PLAN_SOURCES
    ops/attention/attention.cpp ops/attention/kv_append.cpp ops/embedding/embedding.cpp ops/kernels.cpp
    ops/linear/pack/pack.cpp ops/linear/packed/sum.cpp ops/linear/plan.cpp ops/ln_qkv/ln_qkv.cpp
    ops/norm/layernorm.cpp ops/norm/qk_norm.cpp ops/ranks/all_gather.cpp ops/ranks/all_reduce.cpp ops/rms_linear/rms_linear.cpp ops/rope/rope.cpp
    persistent/plan.cpp persistent/variants.cpp
    step/choose.cpp step/dataflow.cpp step/fastest_impl.cpp step/impl.cpp step/lower.cpp step/outline.cpp step/print.cpp)
