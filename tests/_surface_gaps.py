"""Cases of the walk over TensorDictBase that do not hold yet, by cause.

A case is a name and the first letters of its kinds (plain, nested, lazy, ragged, element). Each is
expected to fail; one that passes is an error that asks to take it out here.
"""

from __future__ import annotations

from _surface import KINDS

_CAUSES: dict[str, str] = {
    "inplace=BEST_ATTEMPT_INPLACE has no truth value: the write compares it as one": """
        set/inplace:pnlre update/inplace:pnlre apply/inplace:pnlre apply_:pnlre
        apply_/returned:pnlre named_apply/inplace:pnlre load_state_dict:pnle
    """,
    "a shared value of a lazy stack reads as one value, locally as one for each element": """
        set_non_tensor/str:lr set_non_tensor/int:lr set_non_tensor/float:lr
        set_non_tensor/bool:lr set_non_tensor/list:lr set_non_tensor/tuple:lr
        set_non_tensor/dict:lr entry_class/texts:lr
    """,
    "a text that all places share reads as one value where it is one for each place locally, or the reverse": """
        set/texts_other:pn set/texts_element:pn
    """,
    "a refusal does not say what to call instead": """
        set/text_over:e
    """,
    "rename and refine_names return new names and also set those of the store": """
        rename:pnlre rename/map:pnlre refine_names:e
    """,
    "create_nested and clear of a nested view do not keep the empty tensordict": """
        clear:n create_nested:pnlre
    """,
    "batch sizes of nested tensordicts and empty ones": """
        filter_empty_/deep:r
    """,
    "a ragged batch is written from a value that is read as one tensor": """
        set/item_slice:r set/item_list:r set/item_last:r update_at_/slice:r
    """,
    "update_ writes nothing where the input is a lazy stack": """
        update_/stacked:pn copy_/stacked:pn
        update_:l update_/keys:l copy_:l lock_/update_:l load_:l load_memmap_:l
    """,
    "an out-of-place method works on a shallow copy, and so on the server": """
        split_keys:pnlre replace:pnlre
    """,
    "what is read from a locked store is not locked": """
        lock_/nested:plre lock_/nested_set:plre
    """,
    "select, exclude and split_keys in place are refused without an alternative, or fail half way": """
        select/inplace:pnlr exclude/inplace:pnlr split_keys/inplace:pnlr
        flatten_keys/inplace:pnlr
    """,
    "an element is half changed, or does not name what to call, before a refusal": """
        select/inplace:e exclude/inplace:e flatten_keys/inplace:e unflatten_keys/inplace:e
        rename_key_:e rename_key_/nested:e rename_key_/tree:e
    """,
    "a class method makes a store at localhost or fails with the arguments of the constructor": """
        from_csv:pnlre from_json:pnlre from_parquet:pnlre from_pandas:pnlre from_any:pn
        from_list:pn from_struct_array:pnlre
    """,
    "the copy on another device is locked": """
        to/device:pnl cpu:pnl
    """,
    "consolidate to a file does not work": """
        consolidate:r from_consolidated:pnlre
    """,
    "the swap of to_module closes the handle": """
        to_module:pne
    """,
    "requires_grad_ changes copies and says nothing": """
        requires_grad_:pnlre
    """,
    "an in-place change of shape is refused without an alternative, or changes a copy": """
        reshape/inplace:pnlre flatten/inplace:pnlre unflatten/inplace:pnlre
        repeat_interleave/inplace:pnlre repeat/inplace:pnlre pad/inplace:pnlre gather/inplace:l
    """,
    "a homogeneous lazy store answers as a dense tensordict": """
        add/default:lr sub/default:lr mul/default:lr div/default:lr pow/default:lr densify:lr
        get/ragged_list:l get/ragged_nested:l
    """,
    "a ragged stack is read as one tensor where it needs its elements": """
        abs:r acos:r asin:r atan:r ceil:r cos:r cosh:r erf:r erfc:r exp:r expm1:r floor:r frac:r
        lgamma:r log:r log10:r log1p:r log2:r neg:r reciprocal:r round:r sigmoid:r sign:r sin:r
        sinh:r sqrt:r tan:r tanh:r trunc:r isfinite:r isnan:r isneginf:r isposinf:r isreal:r
        abs_:r acos_:r asin_:r atan_:r ceil_:r cos_:r cosh_:r erf_:r erfc_:r exp_:r expm1_:r
        floor_:r frac_:r lgamma_:r log_:r log10_:r log1p_:r log2_:r neg_:r reciprocal_:r
        round_:r sigmoid_:r sign_:r sin_:r sinh_:r sqrt_:r tan_:r tanh_:r trunc_:r add:r
        add/tensor:r sub:r sub/tensor:r mul:r mul/tensor:r div:r div/tensor:r pow:r pow/tensor:r
        maximum:r maximum/tensor:r minimum:r minimum/tensor:r clamp_max:r clamp_max/tensor:r
        clamp_min:r clamp_min/tensor:r mod:r mod/tensor:r add_:r add_/tensor:r sub_:r
        sub_/tensor:r mul_:r mul_/tensor:r div_:r div_/tensor:r pow_:r pow_/tensor:r maximum_:r
        maximum_/tensor:r minimum_:r minimum_/tensor:r clamp_max_:r clamp_max_/tensor:r
        clamp_min_:r clamp_min_/tensor:r add/number:r add_/number:r sub/number:r sub_/number:r
        mul/number:r mul_/number:r div/number:r div_/number:r pow/number:r pow_/number:r
        bitwise_and:r logical_and:r rsub:r add/alpha:r add_/alpha:r sub_/alpha:r addcdiv:r
        addcdiv_:r addcmul:r addcmul_:r lerp:r lerp_:r clamp:r clamp/tensordict:r
        abs/operators:r isnan/operators:r logical_and/operators:r add_/operators:r zero_:r
        zero_/ints:r masked_fill_:r masked_fill_/first:r softmax:r bfloat16:r bool:r
        complex128:r complex32:r complex64:r double:r float:r float16:r float32:r float64:r
        half:r int:r int16:r int32:r int64:r int8:r uint16:r uint32:r uint64:r uint8:r type:r
        dtype:r clear_device_:r auto_device_:r grad:r zero_grad:r data:r detach:r mean/reduce:r
        nanmean/reduce:r sum/reduce:r nansum/reduce:r prod/reduce:r std/reduce:r var/reduce:r
        all:r any:r auto_batch_size_/dims:r reshape:r reshape/shape:r view/dtype:r flatten:r
        unflatten:r expand:r repeat:r repeat_interleave:r repeat_interleave/last:r
        to_padded_tensor:r split:r split/list:r tensor_split:r chunk:r chunk/last:r unbind:r
        unbind/last:r stack:r stack/function:r cat:r cat/function:r maybe_dense_stack:r
        new_zeros/like:r unbind/function:r split/function:r flatten/function:r
        get_item_shape/ragged:r select/nested:r exclude:r exclude/nested:r separates:r
        flatten_keys:r flatten_keys/dot:r unflatten_keys:r rename_key_/tree:r rename_keys:r
        filter_empty_:r set/tensordict:r update:r update/keys:r update/clone:r update_:r
        update_/dict:r update_/keys:r copy_:r apply:r apply/others:r named_apply:r map:r
        non_tensor_items:r non_tensor_items/nested:r filter_non_tensor_data:r zero_/texts:r
        add/texts:r add/names:r lock_/update_:r bytes:r param_count:r tolist:r to_lazystack:r
        as_tensor:r memmap_like:r load_:r load_memmap_:r
    """,
}

_RANK_CAUSES: dict[str, str] = {
    "a ragged store does not say that its copy is to be sent, or waits for the peer first": """
        send:r recv:r isend:r irecv:r init_remote:r broadcast:r broadcast/into:r all_reduce:r
        reduce:r reduce/away:r all_gather:r scatter:r gather_and_stack:r gather_and_stack/away:r
    """,
    "a receive or a reduction changes a copy": """
        irecv:pnle all_reduce:pnle reduce:pnle reduce/away:pnle
    """,
    "the peer is told to make a store": """
        init_remote:pnle broadcast:pnle all_gather:pnle
    """,
}


def _expand(causes: dict[str, str]) -> dict[tuple[str, str], str]:
    kinds = {kind[0]: kind for kind in KINDS}
    out = {}
    for cause, cases in causes.items():
        for case in cases.split():
            name, _, letters = case.rpartition(":")
            out.update({(kinds[letter], name): cause for letter in letters})
    return out


GAPS = _expand(_CAUSES)
RANK_GAPS = _expand(_RANK_CAUSES)
