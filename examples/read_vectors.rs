//! A golden vector without Python: reads one array of a safetensors file, makes it again from its design, and compares.
//!
//!     rustc -O --edition 2021 read_vectors.rs
//!     ./read_vectors softmax/tiny.safetensors q normal 1 softmax.tiny.q
//!
//! The arguments are FILE NAME DESIGN NUMBER STREAM: DESIGN is normal (NUMBER: its scale) or mask (NUMBER: the
//! probability of true), STREAM is what the manifest has. docs/vectors.md specifies everything that is done here.
//! The exit code is 0 where every number is the same, 1 where one is not, and 2 otherwise.

use std::{env, fs, process};

fn fail(why: &str) -> ! {
    eprintln!("read_vectors: {why}");
    process::exit(2)
}

/// The CRC-32 of zlib.
fn crc32(text: &str) -> u32 {
    !text.bytes().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ byte as u32, |crc, _| (crc >> 1) ^ if crc & 1 == 1 { 0xEDB88320 } else { 0 })
    })
}

/// Word i of a stream with seed, step and layer 0: Philox4x32-10.
fn word(i: u64, purpose: u32) -> u32 {
    let (mut c, mut key) = ([(i / 4) as u32, purpose, 0, 0], [0u32; 2]);
    for _ in 0..10 {
        let (p, q) = (0xD2511F53u64 * c[0] as u64, 0xCD9E8D57u64 * c[2] as u64);
        c = [(q >> 32) as u32 ^ c[1] ^ key[0], q as u32, (p >> 32) as u32 ^ c[3] ^ key[1], p as u32];
        key = [key[0].wrapping_add(0x9E3779B9), key[1].wrapping_add(0xBB67AE85)];
    }
    c[(i % 4) as usize]
}

/// The nearest number with 8 significant bits, ties to even.
fn to_bfloat16(x: f64) -> f64 {
    let exponent = ((x.to_bits() >> 52 & 0x7FF) as i32 - 1023).max(-126);
    let step = 2f64.powi(exponent - 7);
    (x / step).round_ties_even() * step
}

/// Element e of a designed array.
fn made(e: u64, mask: bool, number: f64, purpose: u32) -> f64 {
    if mask {
        return f64::from((word(e, purpose) >> 8) as f64 / 16777216.0 < number);
    }
    let (w, v) = (word(2 * e, purpose), word(2 * e + 1, purpose));
    let halves = ((w & 0xFFFF) + (w >> 16) + (v & 0xFFFF)) as i64;
    to_bfloat16((2 * halves - 196605) as f64 / 65536.0 * number)
}

/// The bytes of an array: no offset is believed before it was compared with the size of the file.
fn array<'a>(file: &'a [u8], name: &str) -> &'a [u8] {
    let Some(size) = file.first_chunk::<8>() else { fail("FILE: is no safetensors file") };
    let Some(header) = usize::try_from(u64::from_le_bytes(*size)).ok().and_then(|n| file[8..].get(..n)) else {
        fail("FILE: its header is longer than the file")
    };
    let Ok(text) = std::str::from_utf8(header) else { fail("FILE: its header is no text") };
    let offsets = text
        .split_once(&format!("\"{name}\":{{"))
        .and_then(|(_, rest)| rest.split_once("\"data_offsets\":["))
        .and_then(|(_, rest)| rest.split_once(']'))
        .map(|(numbers, _)| numbers.split(',').filter_map(|n| n.trim().parse().ok()).collect::<Vec<usize>>());
    let Some([first, last]) = offsets.as_deref() else { fail("NAME: is not in the file") };
    match file[8 + header.len()..].get(*first..*last) {
        Some(data) => data,
        None => fail("FILE: an array reaches beyond its end"),
    }
}

fn main() {
    let given: Vec<String> = env::args().collect();
    let [_, path, name, design, number, stream] = given.as_slice() else { fail("needs FILE NAME DESIGN NUMBER STREAM") };
    let mask = match design.as_str() {
        "mask" => true,
        "normal" => false,
        _ => fail("DESIGN: needs normal or mask"),
    };
    let Ok(number) = number.parse() else { fail("NUMBER: needs a number") };
    let Ok(file) = fs::read(path) else { fail("FILE: cannot be read") };
    let data = array(&file, &format!("{}/{name}", if mask { "bool" } else { "float64" }));
    let values: Vec<f64> = match mask {
        true => data.iter().map(|&x| x as f64).collect(),
        false => data.chunks_exact(8).map(|x| f64::from_le_bytes(x.try_into().unwrap())).collect(),
    };
    for (e, &x) in values.iter().enumerate() {
        let expected = made(e as u64, mask, number, crc32(stream));
        if x != expected {
            println!("{name}: element {e} is {x:e}, made {expected:e}");
            process::exit(1)
        }
    }
    println!("{name}: {} numbers, every bit the same", values.len());
}
