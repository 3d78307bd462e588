//! A golden vector without Python: reads one array of a safetensors file, makes it again from its design, and compares.
//!
//!     rustc -O --edition 2021 read_vectors.rs
//!     ./read_vectors softmax/tiny.safetensors q normal 1 softmax.tiny.q
//!
//! The arguments are FILE NAME DESIGN NUMBERS STREAM, as the manifest has them: NUMBERS are those of the design with
//! commas between, in the order of docs/vectors.md, which specifies everything that is done here.
//! The exit code is 0 where every number is the same, 1 where one is not, and 2 otherwise.

use std::{env, fs, process};

fn fail(why: &str) -> ! {
    eprintln!("read_vectors: {why}");
    process::exit(2)
}

/// The CRC-32 of zlib, of a text after another one.
fn crc32(text: &str, before: u32) -> u32 {
    !text.bytes().fold(!before, |crc, byte| {
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

fn uniform(e: u64, purpose: u32) -> f64 {
    (word(e, purpose) >> 8) as f64 / 16777216.0
}

/// The nearest number with 8 significant bits, ties to even.
fn to_bfloat16(x: f64) -> f64 {
    let exponent = ((x.to_bits() >> 52 & 0x7FF) as i32 - 1023).max(-126);
    let step = 2f64.powi(exponent - 7);
    (x / step).round_ties_even() * step
}

/// Element e of a designed array whose last axes are heads, rows and the width of these.
fn made(e: u64, design: &str, n: &[f64], [heads, rows, width]: [u64; 3], purpose: u32) -> f64 {
    let (row, head) = (e / width % rows, e / width / rows % heads);
    let below = |count: f64| (count as u64 * word(e, purpose) as u64 >> 32) as f64;
    let of = match design {
        "mask" => return f64::from(uniform(e, purpose) < n[0]),
        "band" => return f64::from((e % width) as f64 + n[0] >= row as f64 && (e % width) as f64 <= row as f64 + n[1]),
        "counts" => return n[e as usize % n.len()],
        "list" => return to_bfloat16(n[e as usize % n.len()]),
        "dropout" => return if uniform(e, purpose) < n[0] { 0.0 } else { to_bfloat16(1.0 / (1.0 - n[0])) },
        "biased" if uniform(e, crc32(".hidden", purpose)) < n[1] => return f64::NEG_INFINITY,
        "alibi" => {
            let slope = if n[1] == 0.0 { 2f64.powf(-8.0 * (head + 1) as f64 / heads as f64) } else { n[1] };
            return to_bfloat16(-slope * (row as f64 + n[0] - (e % width) as f64).abs());
        }
        "ranks" => return if e % width == 0 { n[0] * (1 + row / n[1] as u64) as f64 } else { 0.0 },
        "integers" => return n[0] + below(n[1] - n[0] + 1.0),
        "powers" => {
            let m = below(2.0 * (n[1] - n[0] + 1.0));
            return (1.0 - 2.0 * (m % 2.0)) * 2f64.powf(n[0] + (m / 2.0).floor());
        }
        "units" => return f64::from(row * n[0] as u64 % n[1] as u64 == e % width),
        "burst" if row == n[2] as u64 => return to_bfloat16(n[1]),
        "resets" if row % n[1] as u64 == n[1] as u64 - 1 => return f64::NEG_INFINITY,
        "uniform" | "burst" | "resets" => {
            let high = if design == "uniform" { n[1] } else { 0.0 };
            return to_bfloat16((n[0] + (high - n[0]) * uniform(e, purpose)) as f32 as f64);
        }
        "repeated" => e - (row - row % n[1] as u64) * width,
        _ => e,
    };
    let (w, v) = (word(2 * of, purpose), word(2 * of + 1, purpose));
    let halves = ((w & 0xFFFF) + (w >> 16) + (v & 0xFFFF)) as i64;
    let shift = if design == "shifted" && row >= n[3] as u64 && (row - n[3] as u64) % n[2] as u64 == 0 { n[1] } else { 0.0 };
    to_bfloat16((2 * halves - 196605) as f64 / 65536.0 * n[0] + shift)
}

/// The numbers of a list in an array's part of the header.
fn list(text: &str, key: &str) -> Vec<usize> {
    let inner = text.split_once(key).and_then(|(_, rest)| rest.split_once(']')).map_or("", |(inner, _)| inner);
    inner.split(',').filter_map(|n| n.trim().parse().ok()).collect()
}

fn main() {
    let given: Vec<String> = env::args().collect();
    let [_, path, name, design, numbers, stream] = given.as_slice() else { fail("needs FILE NAME DESIGN NUMBERS STREAM") };
    let numbers: Vec<f64> = numbers.split(',').filter_map(|n| n.parse().ok()).collect();
    let Ok(file) = fs::read(path) else { fail("FILE: cannot be read") };
    let Some(size) = file.first_chunk::<8>() else { fail("FILE: is no safetensors file") };
    let Some(header) = usize::try_from(u64::from_le_bytes(*size)).ok().and_then(|n| file[8..].get(..n)) else {
        fail("FILE: its header is longer than the file")
    };
    let Ok(text) = std::str::from_utf8(header) else { fail("FILE: its header is no text") };
    let kind = match design.as_str() { "mask" | "band" => "bool", "counts" => "int64", _ => "float64" };
    let Some((_, entry)) = text.split_once(&format!("\"{kind}/{name}\":{{")) else { fail("NAME: is not in the file") };
    let (shape, offsets) = (list(entry, "\"shape\":["), list(entry, "\"data_offsets\":["));
    let [first, last] = offsets[..] else { fail("FILE: an array is nowhere") };
    let Some(data) = file[8 + header.len()..].get(first..last) else { fail("FILE: an array reaches beyond its end") };
    let values: Vec<f64> = match kind {
        "bool" => data.iter().map(|&x| x as f64).collect(),
        "int64" => data.chunks_exact(8).map(|x| i64::from_le_bytes(x.try_into().unwrap()) as f64).collect(),
        _ => data.chunks_exact(8).map(|x| f64::from_le_bytes(x.try_into().unwrap())).collect(),
    };
    let axis = |from_last: usize| shape.iter().rev().nth(from_last).map_or(1, |&n| n as u64);
    for (e, &x) in values.iter().enumerate() {
        let expected = made(e as u64, design, &numbers, [axis(2), axis(1), axis(0)], crc32(stream, 0));
        if x != expected {
            println!("{name}: element {e} is {x:e}, made {expected:e}");
            process::exit(1)
        }
    }
    println!("{name}: {} numbers, every bit the same", values.len());
}
