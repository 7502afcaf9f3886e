//! Access to the hooks' contexts. The verifier wants each field at a constant offset from the untouched context
//! pointer; compilers like to compute one address from two. So each access is one instruction written out.

/// Reads a 32-bit field of a context (`word n` of one that is an array).
macro_rules! read {
    ($context:expr, $type:ty, $field:ident) => {
        $crate::context::read!($context, $type, $field, 0)
    };
    ($context:expr, $type:ty, $field:ident, $word:literal) => {{
        let context: *mut $type = $context;
        let value: u64;
        // SAFETY: reads a field of the context inside its bounds; the verifier checks that, too.
        unsafe {
            core::arch::asm!("{value} = *(u32 *)({context} + {offset})", value = out(reg) value,
                context = in(reg) context, offset = const core::mem::offset_of!($type, $field) + 4 * $word,
                options(nostack, readonly));
        }
        value as u32
    }};
}

/// Reads a field of four words.
macro_rules! read_words {
    ($context:expr, $type:ty, $field:ident) => {
        [
            $crate::context::read!($context, $type, $field, 0),
            $crate::context::read!($context, $type, $field, 1),
            $crate::context::read!($context, $type, $field, 2),
            $crate::context::read!($context, $type, $field, 3),
        ]
    };
}

/// Reads a 16-bit field.
macro_rules! read_half {
    ($context:expr, $type:ty, $field:ident) => {{
        let context: *mut $type = $context;
        let value: u64;
        // SAFETY: as in `read`.
        unsafe {
            core::arch::asm!("{value} = *(u16 *)({context} + {offset})", value = out(reg) value,
                context = in(reg) context, offset = const core::mem::offset_of!($type, $field),
                options(nostack, readonly));
        }
        value as u16
    }};
}

/// Reads a field that is a pointer.
macro_rules! read_pointer {
    ($context:expr, $type:ty, $field:ident) => {{
        let context: *mut $type = $context;
        let value: *mut core::ffi::c_void;
        // SAFETY: as in `read`.
        unsafe {
            core::arch::asm!("{value} = *(u64 *)({context} + {offset})", value = out(reg) value,
                context = in(reg) context, offset = const core::mem::offset_of!($type, $field),
                options(nostack, readonly));
        }
        value
    }};
}

/// Writes a 32-bit field (`word n` of one that is an array).
macro_rules! write {
    ($context:expr, $type:ty, $field:ident, $value:expr) => {
        $crate::context::write!($context, $type, $field, 0, $value)
    };
    ($context:expr, $type:ty, $field:ident, $word:literal, $value:expr) => {{
        let context: *mut $type = $context;
        let value = u64::from($value);
        // SAFETY: writes a field of the context that the hook may write; the verifier checks that, too.
        unsafe {
            core::arch::asm!("*(u32 *)({context} + {offset}) = {value}", value = in(reg) value,
                context = in(reg) context, offset = const core::mem::offset_of!($type, $field) + 4 * $word,
                options(nostack));
        }
    }};
}

/// Writes a field of four words.
macro_rules! write_words {
    ($context:expr, $type:ty, $field:ident, $words:expr) => {{
        let words: $crate::address::Words = $words;
        $crate::context::write!($context, $type, $field, 0, words[0]);
        $crate::context::write!($context, $type, $field, 1, words[1]);
        $crate::context::write!($context, $type, $field, 2, words[2]);
        $crate::context::write!($context, $type, $field, 3, words[3]);
    }};
}

pub(crate) use {read, read_half, read_pointer, read_words, write, write_words};
